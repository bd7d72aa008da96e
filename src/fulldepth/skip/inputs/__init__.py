"""What blocks are scored with: pairs and text as token ids, and answers of the model itself."""
