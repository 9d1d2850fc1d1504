"""The same training on one device and on several: which rows, what came out, table and picture.

Pure: who carries the rows out, here or as jobs, is `cli.compare`'s affair.
"""
