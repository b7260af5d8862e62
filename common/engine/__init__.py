"""What prefill and decode engines share: sequences, the scheduler, one step. No I/O and no clocks."""
