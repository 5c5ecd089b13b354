"""What a run reports of itself: figures of an interval of steps, alarms, and the places that they go to."""
