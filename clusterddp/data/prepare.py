"""Prepares a dataset: checks it, and fetches or renders it where it is missing."""

from clusterddp.data import mnist


def ensure(dataset: str, data_dir: str, *, may_fetch: bool) -> mnist.DatasetInfo:
    """Check the dataset, and get it first where it is missing.

    A synthetic set is rendered; MNIST is fetched if `may_fetch`. A damaged set is never replaced.
    Safe in several processes at once: each gets a whole set, the first in place stays.
    Raises DataError where no whole set results.
    """
    root = mnist.folder(dataset, data_dir)
    if len(mnist.missing_files(root)) == len(mnist.FILES) and not mnist.under_other_names(root):
        if dataset == "synthetic":
            from clusterddp.data.synthetic import synthesise

            synthesise(data_dir)
        elif may_fetch:
            from clusterddp.data.download import fetch

            fetch(data_dir)
    return mnist.check(dataset, data_dir, checksums=False)
