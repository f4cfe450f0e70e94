"""Ring 3: the measurements behind every speed that we state.

`timing.py` compares arms in one run; `results.py` is the row that every bench makes, and its table, CSV and JSON. A
bench is one file that makes such rows, like `tl_align.py`; `alltokens bench` gives it a command line.
"""
