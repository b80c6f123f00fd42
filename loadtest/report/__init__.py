"""One run, or two side by side, as a page that people look at and a program reads back."""
