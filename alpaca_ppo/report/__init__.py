"""The report of one or several runs: one HTML file that opens from disk, made from the files that a run writes.

`runs` reads the files, `page` chooses what goes into the page and writes it; `assets` holds its styles and scripts.
`refresher` is the callback that writes it while a run trains. Only that one imports torch.
"""
