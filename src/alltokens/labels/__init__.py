"""Ring 2: label maps on disk: a few class ids and scores for every cell of every picture.

`store.py` reads a store, `writer.py` makes one. Below them: `manifest.py` says what a store holds, `layout.py` and
`packing.py` turn maps into rows of bytes and back, `files.py` is the one form that all binary files have, `keys.py`
finds a picture. `formats.py` knows the published label trees, `inspect.py` sums a store up.

To change what a row holds, change `layout.py` and raise FORMAT_VERSION in `files.py`: a store of another version is
refused, never misread.
"""
