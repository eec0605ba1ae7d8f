"""Pages about runs, out of what they left in their folders."""
