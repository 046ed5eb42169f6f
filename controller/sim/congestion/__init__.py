"""Flows under congestion control on links with queues, in small steps of time: numpy arrays."""
