"""The folder holds another author's project: its tests are run by that project, not collected here."""

collect_ignore = ["proteins"]
