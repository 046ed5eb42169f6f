"""BPF programs: compile, load, attach, read their maps."""
