"""Trainers around dmuon, one module each. None of them is imported before it is asked for."""
