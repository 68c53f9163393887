"""Parts that measurements share: headings, limits, clients, other engines, clocks."""
