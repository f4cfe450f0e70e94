"""Studies: several recipes times several seeds, trained where they are missing, compared by numbers that one can trust.

plan.py reads the file, run.py and worker.py train, results.py keeps one row per run, table.py and student.py compare.
"""
