"""Which text of a render is trained: where the turns of the model begin and end, and whether they say what their messages say."""
