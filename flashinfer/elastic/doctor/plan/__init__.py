"""What a workspace costs, who asks what of it, and what becomes of each call.

:mod:`.callers` knows what servers report and ask, :mod:`.outcomes` what upstream and this wheel
make of it; both are plain arithmetic. :mod:`.report` and :mod:`.chart` show it in a terminal,
:mod:`.svg` in a file.
"""
