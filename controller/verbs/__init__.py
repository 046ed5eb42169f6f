"""RDMA verbs: the device, memory regions, queue pairs and completions, on top of pyverbs."""
