"""A hybrid of Mamba-2 and attention: `shape` (no torch), `block`.

What a passed state means here. A Mamba-2 layer carries its recurrent state and its convolution columns. An attention layer has
no recurrence; what it carries is auxiliary: the keys and values of the tokens before, as if they stood just before the segment.
Keys are kept as they were before rotation and are rotated by their distance to the segment, so that a cache holds no position and
fits in front of any segment.

- `state_passing` and `tbtt` hand the cache on with the rest by default: the first tokens of a sequence attend to the last tokens
  of the row's sequence before. `carry_auxiliary: false` leaves out caches and convolution columns and passes the recurrent
  states alone. A reset (of a row, with probability) empties the row's cache too, unless `reset_auxiliary: false`.
- `random_noise` and `fitted_noise` make recurrent states; an attention layer has no entries, and its cache is empty.

With `attention_window` a token sees that many tokens, itself included, and a cache holds one fewer, however long the state is
carried: a window of T_train tokens is full attention within a training sequence that begins from zero. Without a window (null) a cache
holds all tokens since the state was zero, and state passing makes it grow by T_train a step; beyond `attention_cache` tokens the
run stops with a message. Cutting a full cache short instead would make results depend on where a sequence is cut into segments.
"""
