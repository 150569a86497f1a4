"""The scheduler itself, pure: no I/O, no clock, no randomness, no logging. Events in, effects and steps out.

Start with `scheduler.py`, the only module that decides who runs; `settlement.py` takes acknowledgements back in.
"""
