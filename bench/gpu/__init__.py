"""The sections of ``gpu-check``: what only a GPU can prove. Each is a function of a :class:`Bench`.

* ``bench``: the device, findings as they come, time and clocks.
* ``basics``: what is installed, and the ceilings of this device.
* ``correct``: every kernel against fp64.  * ``attention``: its speed over shapes.
* ``handover``: CUDA IPC between two processes.  * ``steps``: prefill and decode steps of a whole model.
* ``cluster``: prefill and decode workers beside one that does both, and beside transformers.
"""
