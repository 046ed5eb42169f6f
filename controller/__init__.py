"""Stellar: a host dataplane for the RoCEv2 traffic of AI training."""

__version__ = "0.1.0"
