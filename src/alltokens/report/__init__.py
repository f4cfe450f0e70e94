"""Ring 3: pictures of what labels, mixes and models do, and the pages that hold them.

`figures` are the drawing functions: data in, a matplotlib Figure out, no global state. `style` holds colours and the
few things that all drawings share, `show` finds the right drawing for a value (public as `alltokens.show`).

`page` writes the report of runs, `label_page` the page of a label store; `html` holds what every page shares, the
templates lie in `templates/`. A page is one file: nothing is fetched, and no name of a user's becomes markup.
"""
