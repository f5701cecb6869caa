"""One tensor-parallel verifier on several ranks: where they run, how they start, who notices that one is gone."""
