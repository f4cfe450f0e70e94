"""Ring 3: the one trainer and what it stands on.

`config` and `loading` (a run's settings, strictly read), `recipes` (where settings come from), `runtime` (accelerate,
built in one place), `run_folder`, `checkpoint`, `schedule`, `optimizer`, `averaging`, `metrics`, `progress`, `trainer`.
A new need becomes an argument of the trainer, not a second loop.
"""
