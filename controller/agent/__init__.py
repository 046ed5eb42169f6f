"""The agent of one host: attaches the dataplane, keeps its queue pair list, answers the CLI."""
