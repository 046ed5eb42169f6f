"""Simulators: jobs that share a link, under the policies that the live controller runs."""
