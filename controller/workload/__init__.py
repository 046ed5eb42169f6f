"""Training jobs of which only the communication is real, to compare policies on one network."""
