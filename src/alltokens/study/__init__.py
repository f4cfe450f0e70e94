"""Studies: several recipes times several seeds, trained where they are missing, compared by numbers that one can trust.

plan.py reads the file; run.py trains what is missing (queue.py: in which order, workers.py: side by side, training.py:
one run); results.py keeps one row per run; table.py and student.py compare; page.py draws.
"""
