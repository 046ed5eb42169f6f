"""Iterations of training jobs: sync windows, their prediction, traces to score it on."""
