"""Rows of a source in, ids and loss mask out, in Arrow: `slice_tokenizer.SliceTokenizer` is the door.

A slice goes through these rooms, a chunk of 2,048 rows at a time:

1. `source`: a row, in any format -> messages in normal form, and which of them are trained;
2. `render`: messages -> the text that the tokenizer's own template writes, and which message wrote which part;
3. `turns`: that text -> the characters that the model has to write, each turn verified against its message. Where one ends decides
   `turns.turn_end`; what happens with a template that nobody has seen says `turns.turn_signs`;
4. `tokens`: texts -> ids by the fastest encoder that is equal to the reference, characters -> tokens;
5. here: what is too long is cut (`select`), rows are counted (`row_counter`), tables written (`arrow`).

Promised: ids are those of `apply_chat_template`; a row whose mask cannot be verified is quarantined with a reason,
alone (what makes that happen, and where: `row_errors`); no template takes more than its budget (`bounds`). Nothing is remembered of one row for another, but
for which prompt a template adds.
"""
