"""What does admission save when more comes than fits, and what does it cost the others?"""
