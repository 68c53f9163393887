"""Models without a description here, computed by transformers' own modules over the paged cache.

``architectures.undescribed`` lists them. ``modules`` loads the modules and examines their attention. ``transformer``
runs a step through the modules. Keys and values are stored in blocks as for any model, so scheduling, transfer and
reuse are the same.
"""
