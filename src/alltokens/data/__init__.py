"""Ring 2: from pictures on disk, or drawn, to batches.

`sources` finds pictures and their classes (folders, tars and shards, Hugging Face datasets, `scenes`), each a map from
an index; `pictures` decodes one; `transforms` and `augment` draw one affine matrix and resample once, `device_augment`
does so for whole batches; `datasets`, `sampler` and `loader` put them together: a sample depends on its seed alone.
A new kind of place is a file here and a line in `open_source`.
"""
