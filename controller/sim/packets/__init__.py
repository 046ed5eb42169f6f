"""Packets one by one through a port: the exact but slow model that checks the faster ones."""
