"""Models that are not described here, computed by transformers' own modules over the paged cache.

``families`` says which; ``modules`` makes them and asks what their attention needs; ``transformer`` runs a step through
them. Keys and values go to blocks as those of any model, so all that is scheduling, transfer and reuse is the same.
"""
