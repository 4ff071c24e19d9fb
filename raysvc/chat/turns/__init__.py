"""Finds the text of a render that is trained: where the turns of the model begin and end, and whether they say what their messages say.

No template is known by its name. One that nobody has seen before is asked first: `turn_signs` has conversations of a few words, and
reads from their renders what the template writes around a turn. Each turn of each row is then found by the rules of
`turn_spans` and verified by `turn_check`. Where the probes show no beginning or end, or a turn does not pass, the row is quarantined
(`raysvc.chat.row_errors`); nothing is guessed.
"""
