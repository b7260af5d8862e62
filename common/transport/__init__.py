"""How KV blocks get from one worker's pool into another's: four verbs, one file per way."""
