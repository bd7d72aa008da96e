"""Tokenised text on disk, and training windows read from it.

`pack` in `windows` is the entry point. Documents come in units that can be read independently. `encoder` tokenises,
`writers` are processes that each claim a unit under a file lock, `token_files` are the files they write, and
`tokenising` starts them where files are missing. `splitting` selects held-out documents and locates token t of a part.
`Windows` is the torch data set, and `order` the order of its items.

The folder of the ids of a text is named by a fingerprint of the tokenizer and the source (files with sizes and times; a
Hub data set with configuration, split and commit) alone: runs with other seeds, shares, lengths and numbers of steps
read the same files, and a run that needs more tokens extends them.

`datasets.Dataset.map` (5.2) is no substitute. It takes no lock, so two machines with one cache folder each tokenise
everything; a killed run starts again, because a cache file is valid only once a process's whole share is in it; a run
that reads the first half leaves a cache that the whole data set does not use, as its fingerprint differs; and a
streamed data set (`IterableDataset.map`) is not cached.
"""
