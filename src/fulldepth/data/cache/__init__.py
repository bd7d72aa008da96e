"""Tokenised text on disk, and training windows read from it.

`pack` in `windows` is the entry. Documents come in units that can be read alone. `encoder` makes ids of their texts,
`writers` are processes that each claim a unit under a file lock, `token_files` are the files that they write once, and
`tokenising` makes what is missing. `splitting` finds out which documents are held out and where token t of a part lies.
`Windows` are the items of a torch data set, and `order` says which item comes when.

The ids of a text lie in a folder of the cache named by a fingerprint of the tokenizer and of the source (files with
sizes and times; a Hub data set with configuration, split and commit), and of nothing else: runs with other seeds,
shares, lengths and numbers of steps read the same files, and one that needs more extends them.

`datasets.Dataset.map` (5.2) does not do this. It takes no lock, so two machines with one cache folder each tokenise
everything; a killed run starts again, because a cache file counts once a whole process's share is in it; a run that
reads only the first half leaves a cache that the whole data set does not use, as its fingerprint is another; and a
streamed data set (`IterableDataset.map`) is not cached.
"""
