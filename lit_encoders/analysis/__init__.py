"""What training did to a model: transplants, alpha sweeps, representations."""
