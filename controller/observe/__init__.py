"""What the flows do: tables, queue pairs, verdicts, replay of captures."""
