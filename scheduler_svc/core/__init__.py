"""The scheduler itself, pure: no I/O, no clock, no randomness, no logging. Events in, effects and steps out.

Start with `scheduler.py`, which takes events and builds steps; `running.py` and `admission.py` are the two passes that
decide who gets tokens; `settlement.py` takes acknowledgements back in. A feature that competes for a place in a step is
one file in `resources/`, an order of requests one in `policies/`.
"""
