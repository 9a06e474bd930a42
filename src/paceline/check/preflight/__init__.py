"""Are the machines fit for this job? What nodes said of themselves -> pass, warning or fail.

Facts come from `topology/node/`; nothing here looks at a machine.
"""
