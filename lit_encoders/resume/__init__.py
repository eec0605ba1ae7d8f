"""Runs that go on where they were: checkpoints that can be trusted, and stopping between two steps."""
