"""Congestion control as numbers: DCQCN parameters, reaction point, marking. No I/O, no clock."""
