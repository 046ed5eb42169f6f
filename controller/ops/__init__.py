"""What an operator asks before and beside the daily work: doctor, tune, plan, ping."""
