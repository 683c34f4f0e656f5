"""What a run would cost in memory, messages and compilation, before it is started."""
