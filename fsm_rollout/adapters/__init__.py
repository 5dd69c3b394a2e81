"""Adapters: finished samples in a trainer's own words.

`handover` says which samples may leave and `tensors` lays them out; `trl`, `slime` and `verl` plug
into those trainers. Nothing here changes a sample, and the rest of the package imports none of it.
"""
