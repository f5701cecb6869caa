"""A drafter that runs elsewhere: the wire, both of its ends, and where a drafter is found."""
