"""What a run will compute and hold, said before it is started."""
