"""What is installed, what the machine has, and whether that goes together.

:mod:`.facts` is what can be known, as plain records. :mod:`.installation`, :mod:`.machine` and
:mod:`.environment` gather them, each from one source, and say what they could not find out.
:mod:`.findings` judges them without looking at anything else. :mod:`.report` shows both to people,
:mod:`.document` to scripts.
"""
