"""The edge of the simulators: scenario files in, tables, JSON and figures out."""
