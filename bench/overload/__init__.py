"""What does admission save in an overload, and what does it cost the other requests?"""
