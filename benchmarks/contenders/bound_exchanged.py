"""The step alone with a bare all-reduce in it: what ranks reach that wait for each other."""

from benchmarks.contenders import bound

if __name__ == "__main__":
    bound.main(exchange=True)
